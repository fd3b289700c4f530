"""Studies of the method, in virtual time: what the product's servers and rules make of a model's loss, and of links.

Run each as `python -m benchmarks.studies.claims` (also `gap`, `delay`, `confirm`, `loss_curve`, `bandwidth`). Workers
train a small byte model with the product's optimizers and kernels. Its loss and gradient alone are computed by C of
their own (`learner/lm.c`): 1.1 ms for 128 bytes and 117,056 parameters on a core of an AMD EPYC, where torch takes
3.8 ms, since small torch operations cost more than their arithmetic; a study of 165 runs takes hours even so.
"""
