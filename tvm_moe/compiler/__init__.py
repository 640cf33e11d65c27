"""The building half: TE computes -> intrinsics -> schedules -> driver -> exported runtime modules. Imports tvm."""
