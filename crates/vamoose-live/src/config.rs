//! Options that are set one by one, so that further ones can be added.

/// A method for each of these fields that sets it.
macro_rules! setters {
    ($config:ident: $($field:ident: $type:ty,)*) => {
        impl $config {
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

pub(crate) use setters;
