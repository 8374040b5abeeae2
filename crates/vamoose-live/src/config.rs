//! Options that are set one by one, so that further ones can be added.

/// A structure of options, and for each option a method that sets it.
macro_rules! options {
    (
        $(#[$about:meta])*
        pub struct $name:ident {
            $($(#[$about_field:meta])* pub $field:ident: $type:ty,)*
        }
    ) => {
        $(#[$about])*
        pub struct $name {
            $($(#[$about_field])* pub $field: $type,)*
        }

        impl $name {
            $(
                #[doc = concat!("Sets [`", stringify!($field), "`](field@Self::", stringify!($field), ").")]
                #[must_use]
                pub fn $field(mut self, $field: $type) -> Self {
                    self.$field = $field;
                    self
                }
            )*
        }
    };
}

pub(crate) use options;
