"""Devices behind one small interface. `base` names it; each other module is one device."""
