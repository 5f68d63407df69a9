//! Sets of names with a value for each.

/// Defines an enum as `choices!` does, with `ALL` of its values in the order of every report, and a type that has one value for
/// each.
macro_rules! indexed {
    (
        $(#[$about:meta])*
        $index:ident,
        $(#[$about_values:meta])*
        $values:ident { $($(#[$doc:meta])* $variant:ident, $field:ident = $name:literal;)+ }
    ) => {
        choices::choices! {
            $(#[$about])*
            #[derive(Hash, PartialOrd, Ord)]
            $index { $($(#[$doc])* $variant = $name,)+ }
        }

        impl $index {
            /// All of them, in the order of every report.
            pub const ALL: [$index; [$($name),+].len()] = [$($index::$variant),+];
        }

        $(#[$about_values])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize,
        )]
        pub struct $values<T = u64> {
            $($(#[$doc])* pub $field: T,)+
        }

        impl<T: Copy> $values<T> {
            /// One of the values.
            pub fn get(&self, index: $index) -> T {
                match index {
                    $($index::$variant => self.$field,)+
                }
            }
        }

        impl<T> $values<T> {
            /// One of the values, to change.
            pub fn get_mut(&mut self, index: $index) -> &mut T {
                match index {
                    $($index::$variant => &mut self.$field,)+
                }
            }
        }
    };
}

pub(crate) use indexed;
