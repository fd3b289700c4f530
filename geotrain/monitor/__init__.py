"""Shows people how a run goes: events, and the status page, metrics and curves that are made from them."""
