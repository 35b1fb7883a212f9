"""The tour: one HTML page of pictures and tables, computed where it is written."""
