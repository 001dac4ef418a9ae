"""Several machines: their supervisors connect, compare settings, number the ranks, and stay connected while the ranks train.

The machine whose own address is HOST is the coordinator; the other machines are members. The messages, in order::

    member       hello         versions, code, settings, devices, and where its ranks can be probed
    coordinator  welcome       or refuse: what differs and what to do; the coordinator then ends with the same text
    member       clock         its time
    coordinator  status        every few seconds: the machines that are here and those that are missing
    coordinator  targets       all machines are here: where each can be probed
    member       reachability  the machines that it could not reach, at ports of the kind that gloo and NCCL use
    coordinator  start         node ranks, all devices, the store
    ...                        ranks train; both sides send `heartbeat` each second
    coordinator  state         what the others must know to go on without it (run_state.py)
    member       has_state     it has received that; stop: a signal
    coordinator  end           the cause, for all to print; done: all ranks of all machines have ended
    ...                        the coordinator is lost (takeover.py)
    member       hello         to another member: what it knows
    member       coordinate    it is the coordinator from now on

Supervisors send JSON lines over TCP, with the standard library alone. Tensors travel over gloo and NCCL; ranks connect at a
TCPStore that the coordinator's supervisor serves. Nothing is encrypted, and whoever reaches the port may join: a private
network is assumed, as with torchrun.
"""

PROTOCOL = 3
"""Version of the messages; `hello`, `refuse` and this number stay readable for all versions."""
