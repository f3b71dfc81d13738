# Sourced by the set-up scripts.

# Installs system packages where that is ours to do: as root, on Debian and its kin.
apt_install() {
    [[ "${APT:-yes}" != no && "$(id -u)" == 0 && -e /etc/debian_version ]] || return 1
    command -v apt-get >/dev/null || return 1
    echo "setup: running as root on Debian: apt-get install $*"
    local output
    if ! output="$({ apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "$@"; } 2>&1)"; then
        echo "setup: apt-get could not do it: $(tail -n 1 <<<"$output")"
        return 1
    fi
}
