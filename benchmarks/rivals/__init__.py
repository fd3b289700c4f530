"""GeoTrain beside what others use across slow links: torch's DDP and PowerSGD, torchft, hivemind."""
