"""Communication inside a region, hidden behind compute."""
