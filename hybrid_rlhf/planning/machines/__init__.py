"""Curves of machines: measured on this one, or modelled from data sheets.

Read `datasheets.py` (modelled), `calibration.py` (measures this machine), `layers.py` (times small models),
`collectives.py` (times several ranks) and `stored.py` (the file of measured curves).
"""
