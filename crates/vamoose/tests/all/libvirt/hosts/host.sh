# Process 1 of a host of the lab, in namespaces of its own: makes the file system of the host, then starts what a host runs.
#
#   host.sh ROOT FOLDER NAME LIBRARY...
#
# ROOT is an unpacked Debian, which is not written to. FOLDER is what the host has of its own: FOLDER/etc becomes /etc,
# FOLDER/run /run and FOLDER/var /var. Each LIBRARY is a folder that all hosts have, at its own path.
set -eu

root=$1 folder=$2 name=$3
shift 3

# What the processes here are called outside, before /proc is that of the host.
read -r pid _ </proc/self/stat
hostname "$name"
mount --make-rprivate /
new=$folder/root
mkdir -p "$new"
mount -t tmpfs -o mode=755 host "$new"
cd "$new"
mkdir dev etc proc run sys tmp var usr
chmod 1777 tmp
mount --bind "$root/usr" usr
mount -o remount,bind,ro usr
for link in bin sbin lib lib64; do
    if [ -L "$root/$link" ] || [ ! -d "$root/$link" ]; then
        ln -s "usr/$link" "$link"
    else
        mkdir "$link"
        mount --bind "$root/$link" "$link"
        mount -o remount,bind,ro "$link"
    fi
done
for own in etc run var; do
    mount --bind "$folder/$own" "$own"
done
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs -o mode=755 dev dev
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
for device in null zero full random urandom userfaultfd; do
    [ -e "/dev/$device" ] || continue
    : >"dev/$device"
    mount --bind "/dev/$device" "dev/$device"
done
mount -t tmpfs -o mode=1777 shm dev/shm
for library; do
    mkdir -p "$new$library"
    mount --bind "$library" "$new$library"
done
echo "$pid"
exec chroot "$new" /bin/busybox sh /etc/host/start
