"""Names that configuration, messages and plans share."""

GLOBAL = "global"  # the global server, beside the names of regions
