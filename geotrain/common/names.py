"""Names and numbers that configuration, messages and plans share."""

GLOBAL = "global"  # the global server, beside the names of regions
# In a worker's environment, whatever its value: its ranks may share GPUs, in turn, and communicate over gloo.
SHARE_DEVICES = "GEOTRAIN_SHARE_DEVICES"
OUTAGE_S = 3600.0  # for which a worker tries to reach its server again
ENDLESS_SAMPLES = 1 << 40  # of a run without an end: data.train_samples is at least so many
