"""What people see of a run: events, and the status page, metrics and curves that are fed from them."""
