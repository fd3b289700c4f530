"""A loop of the user's own, in the outer loop: any torch module, plain or sharded, without GeoTrain's trainer."""
