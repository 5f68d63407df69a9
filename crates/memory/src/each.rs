//! The macro `each!`: an enum with names for files, and a struct with one value for each variant.

/// Makes an enum whose variants have names in files, and a struct with one value per variant, under the same names.
macro_rules! each {
    (
        $(#[$about:meta])*
        $Kind:ident, $(#[$about_values:meta])* $Values:ident {
            $($(#[$about_one:meta])* $One:ident = $one:ident,)+
        }
    ) => {
        $(#[$about])*
        #[derive(
            Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
        )]
        #[serde(rename_all = "snake_case")]
        pub enum $Kind {
            $($(#[$about_one])* $One,)+
        }

        impl $Kind {
            /// All variants, in the order of every report.
            pub const ALL: [$Kind; [$($Kind::$One),+].len()] = [$($Kind::$One),+];

            /// The name in files.
            pub fn name(self) -> &'static str {
                match self {
                    $($Kind::$One => stringify!($one),)+
                }
            }
        }

        $(#[$about_values])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub struct $Values<T> {
            $($(#[$about_one])* pub $one: T,)+
        }

        impl<T: Copy> $Values<T> {
            /// The value of one variant.
            pub fn get(&self, of: $Kind) -> T {
                match of {
                    $($Kind::$One => self.$one,)+
                }
            }

            /// The value of one variant, to change.
            pub fn get_mut(&mut self, of: $Kind) -> &mut T {
                match of {
                    $($Kind::$One => &mut self.$one,)+
                }
            }
        }
    };
}
pub(crate) use each;
