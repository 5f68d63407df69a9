//! The PTX texts of a binary, and what is known of them.

use crate::{Module, ParseError, Report, SourceLines};
use std::sync::OnceLock;

/// One PTX text, and what it becomes when it is first asked for.
struct SourceText {
    name: String,
    text: String,
    module: OnceLock<Result<Module, ParseError>>,
    lines: OnceLock<Result<SourceLines, String>>,
}

type WithLines = dyn Fn(&str) -> Result<String, String> + Send + Sync;
type OnReport = dyn Fn(&str, &Report) + Send + Sync;

/// The PTX texts of a binary. Interpreters share them, and what was decoded of them.
#[derive(Default)]
pub struct PtxTexts {
    sources: Vec<SourceText>,
    with_lines: Option<Box<WithLines>>,
    on_report: Option<Box<OnReport>>,
}

impl PtxTexts {
    /// Texts by the name of their source, without `.cu`: `kernels::cuda::ptx()`.
    pub fn new(texts: impl IntoIterator<Item = (impl Into<String>, String)>) -> PtxTexts {
        let texts = texts.into_iter().map(|(name, text)| SourceText {
            name: name.into(),
            text,
            module: OnceLock::new(),
            lines: OnceLock::new(),
        });
        PtxTexts {
            sources: texts.collect(),
            ..PtxTexts::default()
        }
    }

    /// The same with another text of a source.
    pub fn replacing(mut self, name: &str, text: String) -> PtxTexts {
        let found = self.sources.iter_mut().find(|source| source.name == name);
        let source = found.unwrap_or_else(|| panic!("there is no PTX of `{name}.cu`"));
        *source = SourceText {
            name: name.into(),
            text,
            module: OnceLock::new(),
            lines: OnceLock::new(),
        };
        self
    }

    /// Mistakes say where they are in the CUDA sources, by the text of the source with line information that `with_lines` makes,
    /// or why there is none.
    pub fn with_lines(
        self,
        with_lines: impl Fn(&str) -> Result<String, String> + Send + Sync + 'static,
    ) -> PtxTexts {
        let with_lines = Some(Box::new(with_lines) as _);
        PtxTexts { with_lines, ..self }
    }

    /// Tells `on_report` the kernel and the report of each launch.
    pub fn reporting_to(
        self,
        on_report: impl Fn(&str, &Report) + Send + Sync + 'static,
    ) -> PtxTexts {
        let on_report = Some(Box::new(on_report) as _);
        PtxTexts { on_report, ..self }
    }

    fn source(&self, name: &str) -> Result<&SourceText, String> {
        let source = self.sources.iter().find(|source| source.name == name);
        source.ok_or_else(|| format!("there is no PTX of `{name}.cu`"))
    }

    /// The module of a source.
    pub(crate) fn module(&self, name: &str) -> Result<&Module, String> {
        let source = self.source(name)?;
        let module = source.module.get_or_init(|| Module::parse(&source.text));
        module
            .as_ref()
            .map_err(|error| format!("{name}.cu: {error}"))
    }

    /// The place in the CUDA sources of a line of a source's text, or why it is not known; nothing without line information.
    pub(crate) fn place(&self, name: &str, line: u32) -> Option<String> {
        let with_lines = self.with_lines.as_ref()?;
        let source = self.source(name).ok()?;
        let lines = source.lines.get_or_init(|| {
            with_lines(name).and_then(|located| SourceLines::new(&source.text, &located))
        });
        match lines {
            Ok(lines) => lines.of(line).map(String::from),
            Err(error) => Some(format!("source line unknown: {error}")),
        }
    }

    pub(crate) fn tell(&self, kernel: &str, report: &Report) {
        if let Some(on_report) = &self.on_report {
            on_report(kernel, report);
        }
    }
}
