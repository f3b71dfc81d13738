# Sourced by the set-up scripts.

# Installs system packages where the scripts may do so: as root, on Debian and its derivatives.
apt_install() {
    [[ "${APT:-yes}" != no && "$(id -u)" == 0 && -e /etc/debian_version ]] || return 1
    command -v apt-get >/dev/null || return 1
    echo "setup: running as root on Debian: apt-get install $*"
    local output
    if ! output="$({ apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "$@"; } 2>&1)"; then
        echo "setup: apt-get failed: $(tail -n 1 <<<"$output")"
        return 1
    fi
}
