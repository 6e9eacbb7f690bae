//! What a file holds, by use: sizes for `info`, and for planning what fits where.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::container::Container;
use super::geometry::Geometry;
use super::layout::{self, Role};
use super::open::{ModelError, text_config};

/// Tensors of one use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoleSize {
    /// The use.
    pub role: Role,
    /// How many.
    pub tensors: usize,
    /// Elements.
    pub elements: u64,
    /// Payload bytes.
    pub bytes: u64,
    /// The codecs they are stored in, by name.
    pub codecs: BTreeSet<String>,
}

/// A file, summed up.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// The decoder's shapes.
    pub geometry: Geometry,
    /// Sizes by use, in the order of [`Role`]; uses without tensors are left out.
    pub roles: Vec<RoleSize>,
    /// Bytes of the file or files.
    pub file_bytes: u64,
    /// Bytes of the tokenizer.
    pub vocab_bytes: u64,
}

impl Summary {
    /// Sums up a container.
    ///
    /// # Errors
    ///
    /// As [`text_config`]: the file names another architecture or its config is refused. Missing tensors are none.
    pub fn of(container: &Container) -> Result<Self, ModelError> {
        let config = text_config(container)?;
        let mut uses: HashMap<String, Role> = HashMap::new();
        // No more names than the file can have: a config may promise any number.
        let wanted = layout::decoder(&config).take(container.tensors().len() + 1);
        uses.extend(wanted.map(|wanted| (wanted.name, wanted.role)));
        let mut roles: BTreeMap<Role, RoleSize> = BTreeMap::new();
        for tensor in container.tensors() {
            let role = uses.get(tensor.name()).copied().unwrap_or_else(|| other_role(tensor.name()));
            let empty = RoleSize { role, tensors: 0, elements: 0, bytes: 0, codecs: BTreeSet::new() };
            let size = roles.entry(role).or_insert(empty);
            size.tensors += 1;
            size.elements += tensor.shape().iter().map(|&dim| dim as u64).product::<u64>();
            size.bytes += tensor.payload().len() as u64;
            size.codecs.insert(tensor.codec().to_string());
        }
        Ok(Self {
            geometry: config.geometry,
            roles: roles.into_values().collect(),
            file_bytes: container.file_bytes(),
            vocab_bytes: container.vocab().map_or(0, |vocab| vocab.len() as u64),
        })
    }

    /// Payload bytes of one use.
    #[must_use]
    pub fn bytes_of(&self, role: Role) -> u64 {
        self.roles.iter().find(|size| size.role == role).map_or(0, |size| size.bytes)
    }

    /// Payload bytes of all routed experts, the draft layer's included.
    #[must_use]
    pub fn expert_bytes(&self) -> u64 {
        self.bytes_of(Role::Routed) + self.bytes_of(Role::DraftRouted)
    }

    /// Payload bytes a device needs to hold the whole decoder with all its experts; states, KV and staging come on top.
    #[must_use]
    pub fn decoder_bytes(&self) -> u64 {
        let elsewhere = [Role::Perception, Role::Timestamps, Role::Other];
        self.roles.iter().filter(|size| !elsewhere.contains(&size.role)).map(|size| size.bytes).sum()
    }
}

fn other_role(name: &str) -> Role {
    if name.starts_with("perception.") {
        Role::Perception
    } else if name.starts_with("ctc_timestamp.") {
        Role::Timestamps
    } else {
        Role::Other
    }
}
