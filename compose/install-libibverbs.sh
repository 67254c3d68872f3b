#!/bin/sh
# Installs libibverbs1 where we may; else says what to type. Never fails: the mesh runs without it.
say() {
    echo "Mooncake needs libibverbs.so.1, which is missing here, and this user may not install it. Type:"
    echo "    sudo apt-get install libibverbs1      (Debian, Ubuntu)"
    echo "    sudo dnf install libibverbs           (Fedora, RHEL)"
    echo "Until then KV travels over the slower grpc transfer."
}
run() {
    "$@" apt-get install -y -qq libibverbs1 >/dev/null 2>&1 && return 0
    "$@" apt-get update -qq >/dev/null 2>&1 && "$@" apt-get install -y -qq libibverbs1 >/dev/null 2>&1
}
command -v apt-get >/dev/null 2>&1 || { say; exit 0; }
echo "Installing libibverbs1, which Mooncake loads ..."
if [ "$(id -u)" = 0 ]; then run env DEBIAN_FRONTEND=noninteractive || say
elif sudo -n true 2>/dev/null; then run sudo -n || say
else say; fi
exit 0
