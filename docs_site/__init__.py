"""What `make docs` does beyond mkdocs: outputs, pictures, formulas, tables, the reference."""
