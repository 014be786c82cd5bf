"""Contracts shared by every part of Paceline: API models, names, identity, SLO judge, metric catalogue, wire.

Pure: no I/O, no clock, no randomness, and no import of another Paceline package.
"""

GROUP = "paceline.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
