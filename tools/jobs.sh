#!/bin/sh
# Prints how many compilers may run at once: one for each core, but no more than memory allows (about 2 GB each).
cores=$(nproc)
# A container may own less than the machine shows.
if [ -r /sys/fs/cgroup/cpu.max ]; then
  quota=$(awk '$1 != "max" { n = int($1 / $2 + 0.99); print n < 1 ? 1 : n }' /sys/fs/cgroup/cpu.max)
  if [ -n "$quota" ] && [ "$quota" -lt "$cores" ]; then cores=$quota; fi
fi
megabytes=$(awk '$1 == "MemAvailable:" { print int($2 / 1024) }' /proc/meminfo)
if [ -r /sys/fs/cgroup/memory.max ]; then
  limit=$(awk '$1 != "max" { print int($1 / 1048576) }' /sys/fs/cgroup/memory.max)
  if [ -n "$limit" ] && [ "$limit" -lt "$megabytes" ]; then megabytes=$limit; fi
fi
jobs=$((megabytes / 2000))
[ "$jobs" -gt "$cores" ] && jobs=$cores
[ "$jobs" -lt 1 ] && jobs=1
echo "$jobs"
