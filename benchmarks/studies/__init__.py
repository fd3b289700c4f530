"""Studies of the method, in virtual time: what the product's servers and rules make of a model's loss, and of links.

Run each as `python -m benchmarks.studies.claims` (also `confirm`, `loss_curve`). Workers
train a small byte model in torch with the product's optimizers and kernels. The loss and gradient of 128 bytes and
117,056 parameters take 4 ms of an AMD EPYC core, Muon takes another 4 ms, AdamW 0.3 ms.
"""
