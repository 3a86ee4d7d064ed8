"""fedmoe on real silos: an app for Flower, whose server and nodes each have their own machine.

`server.py` is the ServerApp; `client.py` the ClientApp, which hands messages to the node's worker (`warm.py`,
`node.py`); `supervisor.py`, `app_files.py` and `certificates.py` are what `fedmoe flower` sets up and runs.
"""
