"""Events, and what is fed from them."""
