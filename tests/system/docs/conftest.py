from tests.system.rendezvous.conftest import can_make_machines

__all__ = ["can_make_machines"]
