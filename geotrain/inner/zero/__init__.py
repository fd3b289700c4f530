"""ZeRO-1 whose communication is hidden."""
