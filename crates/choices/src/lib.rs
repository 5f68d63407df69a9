//! Closed sets of values: an enum whose variants have one name each, in settings, files and messages alike.

#[doc(hidden)]
pub use serde;

/// Defines an enum whose variants are read, written and shown under the given names.
///
/// ```
/// choices::choices! {
///     /// Where water is.
///     Water {
///         /// It flows.
///         River = "river",
///         /// It stands.
///         Lake = "lake",
///     }
/// }
/// assert_eq!((Water::NAMES, Water::Lake.name()), (&["river", "lake"][..], "lake"));
/// ```
#[macro_export]
macro_rules! choices {
    (
        $(#[$attribute:meta])*
        $set:ident { $($(#[$about:meta])* $variant:ident = $name:literal,)+ }
    ) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, $crate::serde::Serialize, $crate::serde::Deserialize)]
        #[serde(crate = "choices::serde")]
        pub enum $set {
            $($(#[$about])* #[serde(rename = $name)] $variant,)+
        }

        impl $set {
            /// The names of all values.
            pub const NAMES: &'static [&'static str] = &[$($name),+];

            /// The name of this value.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }
        }

        impl ::std::fmt::Display for $set {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.pad(self.name())
            }
        }
    };
}
