#!/usr/bin/env bash
# Programs that tests/hosts starts on its hosts; as root on Debian or Ubuntu. No service is started or enabled.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
denies_starts=/usr/sbin/policy-rc.d
if [ ! -e "$denies_starts" ]; then
    printf '#!/bin/sh\nexit 101\n' > "$denies_starts"
    chmod 755 "$denies_starts"
    trap 'rm -f "$denies_starts"' EXIT
fi
apt-get -qq update
apt-get -qq install --no-install-recommends --yes iproute2 openssh-client openssh-server pdsh munge slurmctld slurmd \
    util-linux > /dev/null
