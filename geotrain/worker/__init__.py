"""The training side: the loop of every worker, and GeoTrain's own trainer."""
