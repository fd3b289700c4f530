"""ACCO: a worker whose communication is hidden behind compute, for slow networks inside a region."""
