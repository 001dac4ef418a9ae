"""Emulation of Pollux' jobs (Qiao et al., OSDI 2021), to compare policies with its published results.

An epoch takes as many steps of the smallest batch B₀ as were measured; a step with batch B counts
(var + sqr) / (var · B₀/B + sqr) of them, with var and sqr the variance and squared norm of the gradient as measured in this
epoch, linear between batches. A step's seconds are those measured for the placement, linear between local batches; a
placement that was not measured lies between the nearest numbers of hosts with the same number of devices a host. The
published simulator interpolates on a Delaunay triangulation there and rounds the ends of epochs to seconds; the difference
is below 2 % a job. Hosts measured had 4 devices; a larger one counts as several.

A rigid job keeps its replicas and batch. An elastic one chooses its batch after each epoch by a model that it fits to its
own steps (`learning`), and reports a curve to the queue; it predicts for at most twice the devices it has run on.
"""
