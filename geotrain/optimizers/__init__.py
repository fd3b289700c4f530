"""The inner optimizer, which steps the weights inside a worker: AdamW, and Muon for hidden matrices."""
