"""The paceline command, and the local runtime that runs the same objects as processes on one machine."""
