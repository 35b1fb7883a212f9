"""Agreement with other libraries."""
