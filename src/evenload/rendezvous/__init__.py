"""Several machines: where their supervisors meet, what they compare, how they stay in touch while their ranks train.

The machine whose own address is HOST serves the meeting point, the others connect. What is said, in order::

    guest   hello     who it is: versions, code, settings, devices, where its ranks can be reached
    point   welcome   or refuse: what differs, and what to do; the point then ends with the same words
    guest   arrived   its clock
    point   waiting   every few seconds: who is here, who is missing
    point   roster    all are here: where each can be reached
    guest   reached   which of the others it could reach, at ports of the kind that gloo and NCCL use
    point   go        node ranks, all devices, the store
    ...               ranks train; both sides say `beat` each second
    guest   failed    a rank's story; asked: a signal; ended: its ranks are through
    point   end       the cause, for all to tell; done: all ranks of all machines are through

Supervisors speak JSON lines over TCP, from the standard library alone. Tensors travel by gloo and NCCL; ranks meet at a
TCPStore that the point's supervisor serves. Nothing is encrypted, and whoever reaches the port may join: a network of
one's own is assumed, as with torchrun.
"""

PROTOCOL = 1
"""Of what supervisors say to each other; `hello`, `refuse` and this number stay readable for all versions."""
