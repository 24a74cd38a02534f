//! What the core did, note by note: tests compare it with an engine's own classes. Off, it costs a branch.

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    pub what: &'static str,
    /// The id of the request concerned, if there is one.
    pub name: String,
    /// Ids, keys and flags; `what` says which.
    pub numbers: Vec<u64>,
}

#[derive(Debug, Default)]
pub struct Journal(Option<Vec<Note>>);

impl Journal {
    pub fn new(on: bool) -> Self {
        Self(on.then(Vec::new))
    }

    pub fn on(&self) -> bool {
        self.0.is_some()
    }

    pub fn note(&mut self, what: &'static str, numbers: impl FnOnce() -> Vec<u64>) {
        self.name(what, "", numbers);
    }

    pub fn name(&mut self, what: &'static str, name: &str, numbers: impl FnOnce() -> Vec<u64>) {
        if let Some(notes) = &mut self.0 {
            notes.push(Note { what, name: name.to_string(), numbers: numbers() });
        }
    }

    /// The notes since the last call.
    pub fn take(&mut self) -> Vec<Note> {
        self.0.as_mut().map(std::mem::take).unwrap_or_default()
    }
}
