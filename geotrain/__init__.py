"""GeoTrain: pretrain language models on GPU clusters in several regions, joined by slow links."""

__version__ = "0.1.0"
