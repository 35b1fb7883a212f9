"""The tour: pictures and one HTML page. Numbers come from the public API and from `bench`."""
