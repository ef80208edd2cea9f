"""Scripts behind every published number."""
