"""Questions about pictures: a co-attention network that reads the picture by any attention."""
