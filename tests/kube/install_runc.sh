#!/bin/sh
# Installs runc from the system's own packages where it is missing (Debian and its kin, as root).
set -eu
if command -v runc >/dev/null 2>&1; then
    exit 0
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "runc is missing and this system has no apt-get: install runc and run make node again" >&2
    exit 1
fi
apt-get update
apt-get install --yes --no-install-recommends runc
