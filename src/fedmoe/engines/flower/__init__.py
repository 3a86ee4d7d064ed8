"""The Flower engine: the same algorithms on real silos, or in Flower's simulation.

`client.py` is a node's ClientApp; it needs no torch and hands its messages to a worker that stays alive (`warm.py`,
`node.py`). `grid.py` is the transport of the server's side, which `fedmoe.silos` runs in a ServerApp. `records.py`
is what travels: frames as Flower's named arrays.
"""
