"""Studies: variants × seeds × data sets, and what they say about a setting."""
