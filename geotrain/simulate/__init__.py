"""A virtual clock and virtual links around the classes of geotrain.outer."""
