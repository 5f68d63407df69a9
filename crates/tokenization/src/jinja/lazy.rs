//! Generators and dictionary views, which Python returns instead of lists.

use minijinja::Value;
use minijinja::value::{Enumerator, Object, ObjectRepr};
use std::sync::{Arc, Mutex};

/// The items of a generator, which are gone once something went through them, or of a dictionary's view.
#[derive(Debug)]
pub(super) struct Lazy {
    items: Mutex<Vec<Value>>,
    is_generator: bool,
}

impl Lazy {
    pub(super) fn generator(items: Vec<Value>) -> Value {
        Value::from_object(Lazy {
            items: Mutex::new(items),
            is_generator: true,
        })
    }

    /// The keys, values or entries of a dictionary.
    pub(super) fn view(items: Vec<Value>) -> Value {
        Value::from_object(Lazy {
            items: Mutex::new(items),
            is_generator: false,
        })
    }

    /// Whether a value has no length, since going through it uses it up.
    pub(super) fn is_generator(value: &Value) -> bool {
        let lazy = value.downcast_object_ref::<Lazy>();
        lazy.is_some_and(|lazy| lazy.is_generator)
    }
}

impl Object for Lazy {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let mut items = self.items.lock().expect("nothing panics with the lock");
        Enumerator::Values(match self.is_generator {
            true => std::mem::take(&mut *items),
            false => items.clone(),
        })
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        let items = self.items.lock().expect("nothing panics with the lock");
        (!self.is_generator).then_some(items.len())
    }
}
