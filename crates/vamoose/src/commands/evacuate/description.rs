//! Obstacles to a guest's migration, from its description.

use std::iter;

use roxmltree::{Document, Node};

/// The parts of a guest's description that matter to a migration.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Description {
    /// Reasons why the guest cannot move at all.
    pub(super) obstacles: Vec<String>,
    /// The guest has, and needs, all features of the source's CPU.
    pub(super) has_host_cpu: bool,
    /// What its disks are made from: the image below the first one that has any, or else its operating system, as libosinfo calls it.
    pub(super) image: Option<String>,
    /// Disks that are files or block devices, and that the guest writes alone, by their targets: those that can be copied.
    pub(super) own_disks: Vec<String>,
}

impl Description {
    /// `has_all_disks`: the destinations have the disks' images, or get copies of them.
    pub(super) fn parse(xml: &str, has_all_disks: bool) -> Result<Self, roxmltree::Error> {
        let document = Document::parse(xml)?;
        let domain = document.root_element();
        Ok(Self {
            obstacles: obstacles(domain, has_all_disks),
            has_host_cpu: has_host_cpu(domain),
            image: image(domain),
            own_disks: own_disks(domain),
        })
    }
}

/// The host's CPU, from its capabilities.
pub(super) fn host_cpu(capabilities: &str) -> Option<String> {
    let document = Document::parse(capabilities).ok()?;
    let host = child(document.root_element(), "host")?;
    let cpu = child(host, "cpu")?;
    Some(capabilities[cpu.range()].to_owned())
}

/// The host's UUID, from its capabilities.
pub(super) fn host_uuid(capabilities: &str) -> Option<String> {
    let document = Document::parse(capabilities).ok()?;
    let uuid = child(child(document.root_element(), "host")?, "uuid")?;
    uuid.text().map(str::to_owned)
}

/// Whether the CPU's mode is one that libvirt does not compare with the destination. An emulated CPU does not depend on the host.
fn has_host_cpu(domain: Node<'_, '_>) -> bool {
    let mode = child(domain, "cpu").and_then(|cpu| cpu.attribute("mode"));
    let is_of_host = matches!(mode, Some("host-passthrough" | "maximum"));
    is_of_host && domain.attribute("type") == Some("kvm")
}

fn obstacles(domain: Node<'_, '_>, has_all_disks: bool) -> Vec<String> {
    let devices = child(domain, "devices");
    let devices = devices.iter().flat_map(|devices| devices.children());
    devices
        .filter_map(|device| match device.tag_name().name() {
            "disk" if !has_all_disks => local_disk(device),
            "hostdev" => passed_through(device),
            "interface" if device.attribute("type") == Some("hostdev") => passed_through(device),
            "filesystem" => Some(format!(
                "a folder of its host is shared with it ({})",
                child(device, "target")
                    .and_then(|it| it.attribute("dir"))
                    .unwrap_or("no name")
            )),
            _ => None,
        })
        .collect()
}

fn local_disk(disk: Node<'_, '_>) -> Option<String> {
    let file = file(disk)?;
    Some(format!(
        "disk {} is {file}: use --shared-storage if all hosts have the same file there, or --copy-storage to copy it",
        target(disk).unwrap_or("without a name")
    ))
}

fn disks<'a, 'input>(domain: Node<'a, 'input>) -> impl Iterator<Item = Node<'a, 'input>> {
    let devices = child(domain, "devices").into_iter();
    let devices = devices.flat_map(|devices| devices.children());
    devices.filter(|device| device.has_tag_name("disk"))
}

fn image(domain: Node<'_, '_>) -> Option<String> {
    const OS: (&str, &str) = ("http://libosinfo.org/xmlns/libvirt/domain/1.0", "os");
    let below = |disk| {
        let stores = iter::successors(child(disk, "backingStore"), |it| child(*it, "backingStore"));
        stores.filter_map(|store| child(store, "source")).last()
    };
    let names = ["file", "dev", "name"];
    let name = |image: Node<'_, '_>| {
        names
            .iter()
            .find_map(|it| image.attribute(*it))
            .map(str::to_owned)
    };
    let os = || {
        domain
            .descendants()
            .find(|it| it.has_tag_name(OS))?
            .attribute("id")
            .map(str::to_owned)
    };
    disks(domain).filter_map(below).find_map(name).or_else(os)
}

fn own_disks(domain: Node<'_, '_>) -> Vec<String> {
    let is_own = |disk: &Node<'_, '_>| {
        let is_shared = ["readonly", "shareable"]
            .iter()
            .any(|it| child(*disk, it).is_some());
        file(*disk).is_some() && !is_shared
    };
    let targets = disks(domain).filter(is_own).filter_map(target);
    targets.map(str::to_owned).collect()
}

/// What a disk is on its host, if that is not on the network.
fn file<'a>(disk: Node<'a, '_>) -> Option<&'a str> {
    let source = child(disk, "source")?;
    let mut names = ["file", "dev", "dir"].iter();
    names.find_map(|name| source.attribute(*name))
}

fn target<'a>(disk: Node<'a, '_>) -> Option<&'a str> {
    child(disk, "target")?.attribute("dev")
}

/// The obstacle of a host device. A device with a stand-in (`teaming`) is none: it is unplugged for the migration.
fn passed_through(device: Node<'_, '_>) -> Option<String> {
    let teaming = child(device, "teaming").and_then(|it| it.attribute("type"));
    if teaming == Some("transient") {
        return None;
    }
    let kind = device.attribute("type").unwrap_or("of an unknown kind");
    let source = child(device, "source");
    let address = source.and_then(|source| child(source, "address"));
    let numbers = address.iter().flat_map(Node::attributes);
    let numbers: Vec<_> = numbers
        .map(|it| it.value().trim_start_matches("0x"))
        .collect();
    let at = match numbers[..] {
        [domain, bus, slot, function] => format!("{domain}:{bus}:{slot}.{function}"),
        _ => kind.to_owned(),
    };
    Some(format!("a device of its host is passed through: {at}"))
}

fn child<'a, 'input>(of: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    of.children().find(|child| child.has_tag_name(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOMAIN: &str = "<domain type='kvm'><name>web1</name>
        <os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type></os>
        <cpu mode='custom' match='exact'><model fallback='forbid'>Skylake-Client</model></cpu>
        <devices>
          <disk type='file' device='disk'><source file='/images/a' index='1'/><target dev='vda'/></disk>
          <disk type='network' device='disk'><source protocol='rbd' name='pool/b'/><target dev='vdb'/></disk>
          <disk type='file' device='cdrom'><target dev='sda'/></disk>
          <hostdev mode='subsystem' type='pci' managed='yes'>
            <source><address domain='0x0000' bus='0x3b' slot='0x02' function='0x1'/></source>
          </hostdev>
          <hostdev mode='subsystem' type='usb'><source/></hostdev>
          <interface type='hostdev'><teaming type='transient' persistent='ua-0'/></interface>
          <interface type='network'/>
          <filesystem type='mount'><source dir='/srv'/><target dir='share'/></filesystem>
        </devices></domain>";

    #[test]
    fn obstacles_are_found() {
        let obstacles = |has_all_disks| {
            let description = Description::parse(DOMAIN, has_all_disks);
            description.unwrap().obstacles
        };
        let [disk, pci, usb, folder] = &obstacles(false)[..] else {
            panic!("{:?}", obstacles(false));
        };
        assert!(
            disk.starts_with("disk vda is /images/a: use --shared-storage"),
            "{disk}"
        );
        assert_eq!(pci, "a device of its host is passed through: 0000:3b:02.1");
        assert_eq!(usb, "a device of its host is passed through: usb");
        assert_eq!(folder, "a folder of its host is shared with it (share)");
        assert_eq!(obstacles(true).len(), 3);
    }

    /// Libvirt would also copy a disk on the network, onto itself.
    #[test]
    fn only_files_that_the_guest_writes_alone_are_copied() {
        let own = |xml: &str| Description::parse(xml, true).unwrap().own_disks;
        assert_eq!(own(DOMAIN), ["vda"]);
        let disk = |more: &str| {
            format!(
                "<domain><devices><disk><source dev='/dev/x'/><target dev='vdc'/>{more}</disk></devices></domain>"
            )
        };
        assert_eq!(own(&disk("")), ["vdc"]);
        assert!(own(&disk("<shareable/>")).is_empty());
        assert!(own(&disk("<readonly/>")).is_empty());
    }

    #[test]
    fn siblings_have_one_image_or_one_system() {
        let image = |xml: &str| Description::parse(xml, true).unwrap().image;
        let disk = "<disk type='file'><source file='/images/web1'/>
            <backingStore type='file'><format type='qcow2'/><source file='/images/web'/>
              <backingStore type='file'><source file='/images/debian12'/><backingStore/></backingStore>
            </backingStore><target dev='vda'/></disk>";
        let system = "<metadata><libosinfo:libosinfo xmlns:libosinfo='http://libosinfo.org/xmlns/libvirt/domain/1.0'>
            <libosinfo:os id='http://debian.org/debian/12'/></libosinfo:libosinfo></metadata><os><type>hvm</type></os>";
        let domain = |disk| format!("<domain>{system}<devices>{disk}</devices></domain>");
        assert_eq!(image(&domain(disk)).as_deref(), Some("/images/debian12"));
        let system = image(&domain("<disk><backingStore/></disk>"));
        assert_eq!(system.as_deref(), Some("http://debian.org/debian/12"));
        assert_eq!(image(DOMAIN), None);
    }

    #[test]
    fn guests_with_the_hosts_cpu_are_recognised() {
        let cpu = |xml: &str| Description::parse(xml, false).unwrap().has_host_cpu;
        for (xml, expected) in [
            (DOMAIN, false),
            (
                "<domain type='kvm'><cpu mode='host-passthrough'/></domain>",
                true,
            ),
            ("<domain type='qemu'><cpu mode='maximum'/></domain>", false),
            ("<domain/>", false),
        ] {
            assert_eq!(cpu(xml), expected, "{xml}");
        }
        let host =
            host_cpu("<capabilities><host><cpu><arch>x86_64</arch></cpu></host></capabilities>");
        assert_eq!(host.as_deref(), Some("<cpu><arch>x86_64</arch></cpu>"));
    }

    #[test]
    fn invalid_xml_is_an_error() {
        assert!(Description::parse("<domain>", false).is_err());
    }
}
