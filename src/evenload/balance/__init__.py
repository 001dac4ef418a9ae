"""The idea of the project, as pure mathematics: measure, fit, split, run, measure again.

Devices of unequal speed share each step. If rank r computes n_r of the step's samples in K micro-batches it needs

    t_r = K * a_r + c_r * n_r    seconds,

and the step takes as long as the slowest rank. So:

1. **Measure** each rank's own seconds (the caller does that) and show them to a `rebalance.Balancer`, step by step.
2. **Fit** a_r and c_r (`cost`): robustly, with a confidence, from the steps at the rank's present speed (`drift`).
3. **Split** the batch into integer shares whose slowest rank is as fast as possible (`split`): exact, deterministic.
4. **Move** only where the predicted gain beats the noise of the measurement and the cost of moving (`rebalance`).

    >>> from evenload.balance.split import split_batch
    >>> from evenload.balance.values import Cost
    >>> split_batch(256, [Cost(0.0, 0.001), Cost(0.0, 0.003)]).shares
    (192, 64)

Modules: `values` the frozen values of all packages; `split` the shares; `cost` the cost of a rank; `drift` changes of speed;
`rebalance` decisions. Nothing here reads a clock, a file or a device, imports torch,
or knows that there are processes: the same numbers give the same decisions, in training, in a test and in a plan.
"""
