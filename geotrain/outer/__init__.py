"""Across workers and regions: pure logic. No socket, no disk, no clock, no DeepSpeed."""
