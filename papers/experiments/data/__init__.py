"""Data in the files it is published in, and what is drawn here."""
