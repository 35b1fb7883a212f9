"""A vision transformer whose class token reads the image by any attention of the library."""
