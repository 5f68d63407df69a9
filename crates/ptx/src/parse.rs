//! Reads a module: directives, declarations, and the instructions of each kernel.

use crate::access::VARIABLES_WINDOW;
use crate::declaration::{Declaration, GAP_BYTES, SharedArrays, type_bytes};
use crate::error::ParseError;
use crate::executable::Executable;
use crate::kernel::{
    PtxInstruction, PtxKernel, PtxParameter, SHARED_BYTES_MAX, SHARED_BYTES_MAX_ON_HOPPER,
};
use crate::memory::AddressSpace;
use crate::opcodes;
use crate::operands::{Names, PtxOperand, PtxOperands};
use crate::registers::Condition;
use crate::text::{Token, tokens};
use std::collections::{HashMap, HashSet};

/// Reads a text: its kernels and its variables.
pub(crate) fn parse(text: &str) -> Result<(Vec<PtxKernel>, AddressSpace), ParseError> {
    let mut parser = Parser {
        tokens: tokens(text)?,
        at: 0,
        names: HashMap::new(),
        variables: AddressSpace::default(),
        variables_end: VARIABLES_WINDOW,
        shared: Vec::new(),
        target: "",
    };
    let mut kernels = Vec::new();
    while let Some(token) = parser.peek() {
        match token {
            Token::Word(".target") => parser.target()?,
            Token::Word(".version" | ".address_size") => parser.skip_line(),
            Token::Word(".visible" | ".extern" | ".weak") => parser.at += 1,
            Token::Word(".entry") => kernels.push(parser.kernel()?),
            Token::Word(".global" | ".const") => parser.variable()?,
            Token::Word(".shared") => parser.shared()?,
            other => return parser.refuse(format!("{other:?} is not supported here")),
        }
    }
    Ok((kernels, parser.variables))
}

struct Parser<'t> {
    tokens: Vec<(Token<'t>, u32)>,
    at: usize,
    /// Addresses of the module's variables.
    names: HashMap<&'t str, u64>,
    variables: AddressSpace,
    variables_end: u64,
    /// Shared arrays declared outside kernels; a block gets those that its kernel mentions. Without elements: dynamic ones.
    shared: Vec<Declaration<'t>>,
    target: &'t str,
}

impl<'t> Parser<'t> {
    fn peek(&self) -> Option<Token<'t>> {
        self.tokens.get(self.at).map(|(token, _)| *token)
    }

    fn line(&self) -> u32 {
        let at = self.at.min(self.tokens.len().saturating_sub(1));
        self.tokens.get(at).map_or(1, |(_, line)| *line)
    }

    fn refuse<T>(&self, message: impl Into<String>) -> Result<T, ParseError> {
        Err(ParseError {
            line: self.line(),
            message: message.into(),
        })
    }

    fn next(&mut self) -> Result<Token<'t>, ParseError> {
        match self.peek() {
            Some(token) => {
                self.at += 1;
                Ok(token)
            }
            None => self.refuse("the text ends too early"),
        }
    }

    /// Whether the next token is this mark, which is then passed.
    fn passes(&mut self, mark: u8) -> bool {
        let is_next = self.peek() == Some(Token::Mark(mark));
        self.at += usize::from(is_next);
        is_next
    }

    fn expect(&mut self, mark: u8) -> Result<(), ParseError> {
        match self.passes(mark) {
            true => Ok(()),
            false => self.refuse(format!("`{}` is missing", mark as char)),
        }
    }

    fn word(&mut self) -> Result<&'t str, ParseError> {
        match self.peek() {
            Some(Token::Word(word)) => {
                self.at += 1;
                Ok(word)
            }
            other => self.refuse(format!("{other:?} in place of a word")),
        }
    }

    fn integer(&mut self) -> Result<u64, ParseError> {
        let is_negative = self.passes(b'-');
        match self.peek() {
            Some(Token::Integer(value)) => {
                self.at += 1;
                Ok(if is_negative {
                    value.wrapping_neg()
                } else {
                    value
                })
            }
            other => self.refuse(format!("{other:?} in place of an integer")),
        }
    }

    /// `.target sm_90a`
    fn target(&mut self) -> Result<(), ParseError> {
        let line = self.line();
        self.at += 1;
        self.target = self.word()?;
        self.skip_rest_of(line);
        Ok(())
    }

    fn skip_line(&mut self) {
        self.skip_rest_of(self.line());
    }

    fn skip_rest_of(&mut self, line: u32) {
        while self.peek().is_some() && self.line() == line {
            self.at += 1;
        }
    }

    fn skip_statement(&mut self) -> Result<(), ParseError> {
        while !self.passes(b';') {
            self.next()?;
        }
        Ok(())
    }

    /// `.align 4 .b8 name[16]`, behind the word that names the space.
    fn declaration(&mut self) -> Result<Declaration<'t>, ParseError> {
        let mut alignment = None;
        if self.peek() == Some(Token::Word(".align")) {
            self.at += 1;
            alignment = Some(self.integer()?);
        }
        let kind = self.word()?;
        let Some(element_bytes) = type_bytes(kind) else {
            return self.refuse(format!("`{kind}` is no type"));
        };
        let name = self.word()?;
        let mut elements = None;
        if self.passes(b'[') {
            elements = match self.peek() {
                Some(Token::Mark(b']')) => Some(0),
                _ => Some(self.integer()? as usize),
            };
            self.expect(b']')?;
        }
        Ok(Declaration {
            alignment: alignment.unwrap_or(element_bytes as u64),
            element_bytes,
            name,
            elements,
        })
    }

    /// `.global .align 4 .u32 NAME = 8;`, with all elements behind the `=` or zeros.
    fn variable(&mut self) -> Result<(), ParseError> {
        self.at += 1;
        let declaration = self.declaration()?;
        let mut bytes = Vec::with_capacity(declaration.bytes());
        if self.passes(b'=') {
            let is_list = self.passes(b'{');
            loop {
                let value = match self.peek() {
                    Some(Token::Float(bits)) => u64::from(bits),
                    Some(Token::Double(bits)) => bits,
                    _ => self.integer()?,
                };
                if let Some(Token::Float(_) | Token::Double(_)) = self.peek() {
                    self.at += 1;
                }
                bytes.extend(&value.to_le_bytes()[..declaration.element_bytes]);
                if !(is_list && self.passes(b',')) {
                    break;
                }
            }
            if is_list {
                self.expect(b'}')?;
            }
        }
        self.expect(b';')?;
        bytes.resize(declaration.bytes(), 0);
        let base = self
            .variables_end
            .next_multiple_of(declaration.alignment.max(16));
        self.variables.add(base, declaration.name, bytes.len());
        let place = self.variables.bytes_mut(base, bytes.len());
        place
            .expect("it has just been added")
            .copy_from_slice(&bytes);
        self.variables_end = base + bytes.len() as u64 + GAP_BYTES;
        self.names.insert(declaration.name, base);
        Ok(())
    }

    /// `.extern .shared .align 128 .b8 name[];`, which is dynamic, or `.shared .align 4 .b8 name[128];`
    fn shared(&mut self) -> Result<(), ParseError> {
        self.at += 1;
        let declaration = self.declaration()?;
        self.shared.push(declaration);
        self.expect(b';')
    }

    /// Places the shared arrays that a kernel, whose body comes next, declares or names.
    fn place_shared(&mut self, names: &mut Names<'t>) -> Result<SharedArrays, ParseError> {
        let (start, mut depth) = (self.at, 0);
        let (mut own, mut words) = (Vec::new(), HashSet::new());
        loop {
            match self.next()? {
                Token::Word(".shared") => own.push(self.declaration()?),
                Token::Word(word) => drop(words.insert(word)),
                Token::Mark(b'{') => depth += 1,
                Token::Mark(b'}') if depth == 1 => break,
                Token::Mark(b'}') => depth -= 1,
                _ => {}
            }
        }
        self.at = start;
        let all = self.shared.iter();
        let named = all.filter(|array| words.contains(array.name)).copied();
        let declared: Vec<Declaration> = named.chain(own).collect();
        let shared = SharedArrays::new(&declared);
        let places = declared
            .iter()
            .map(|array| (array.name, shared.address(array)));
        names.variables.extend(places);
        Ok(shared)
    }

    fn kernel(&mut self) -> Result<PtxKernel, ParseError> {
        self.at += 1;
        let name = self.word()?;
        let mut names = Names::new(self.names.clone());
        let parameters = self.parameters(&mut names)?;
        let (threads_max, blocks_min) = self.tuning()?;
        let shared = self.place_shared(&mut names)?;
        let mut body = Body {
            parser: self,
            names,
            code: Vec::new(),
            places: Vec::new(),
            local_bytes: 0,
        };
        body.read()?;
        let Body {
            names,
            code,
            local_bytes,
            ..
        } = body;
        self.check_groups(&code, threads_max.is_some())?;
        Ok(PtxKernel {
            name: name.into(),
            parameters,
            has_products: code.iter().any(|code| code.opcode.starts_with("wgmma.")),
            code,
            registers: names.registers,
            shared,
            local_bytes,
            threads_max,
            blocks_min,
            shared_bytes_max: match self.target {
                "sm_90" | "sm_90a" => SHARED_BYTES_MAX_ON_HOPPER,
                _ => SHARED_BYTES_MAX,
            },
        })
    }

    /// Refuses instructions of groups of warps where the target lacks them, or nobody says how many registers there are.
    fn check_groups(&self, code: &[PtxInstruction], is_bounded: bool) -> Result<(), ParseError> {
        for PtxInstruction { opcode, line, .. } in code {
            let is_counting = opcode.starts_with("setmaxnreg.");
            let lacking = match is_counting || opcode.starts_with("wgmma.") {
                true if self.target != "sm_90a" => ".target sm_90a",
                true if is_counting && !is_bounded => ".maxntid, from which registers follow",
                _ => continue,
            };
            let (message, line) = (format!("`{opcode}` without {lacking}"), *line);
            return Err(ParseError { line, message });
        }
        Ok(())
    }

    /// `(.param .u64 a, .param .align 8 .b8 b[24])`, each at the next multiple of its alignment.
    fn parameters(&mut self, names: &mut Names<'t>) -> Result<Vec<PtxParameter>, ParseError> {
        let mut parameters: Vec<PtxParameter> = Vec::new();
        if !self.passes(b'(') {
            return Ok(parameters);
        }
        while !self.passes(b')') {
            if self.word()? != ".param" {
                return self.refuse("a parameter is missing");
            }
            let declaration = self.declaration()?;
            let last = parameters.last();
            let end = last.map_or(0, |last| last.offset + last.bytes);
            let offset = end.next_multiple_of(declaration.alignment as usize);
            names.parameters.insert(declaration.name, offset);
            let bytes = declaration.bytes();
            parameters.push(PtxParameter { offset, bytes });
            self.passes(b',');
        }
        Ok(parameters)
    }

    /// Reads the directives between a kernel's parameters and its body. Returns the most threads of a block, and
    /// how many blocks have to fit on a multiprocessor.
    fn tuning(&mut self) -> Result<(Option<u64>, u32), ParseError> {
        let (mut threads_max, mut blocks_min) = (None, 1);
        while self.peek() != Some(Token::Mark(b'{')) {
            let directive = self.word()?;
            let mut product = self.integer()?;
            while self.passes(b',') {
                product *= self.integer()?;
            }
            match directive {
                ".maxntid" => threads_max = Some(product),
                ".minnctapersm" => blocks_min = product as u32,
                other => return self.refuse(format!("`{other}` is not supported")),
            }
        }
        Ok((threads_max, blocks_min))
    }
}

/// A kernel's body while it is read.
struct Body<'p, 't> {
    parser: &'p mut Parser<'t>,
    names: Names<'t>,
    code: Vec<PtxInstruction>,
    /// Where each label is, by its number.
    places: Vec<(usize, usize)>,
    local_bytes: usize,
}

impl<'t> Body<'_, 't> {
    fn read(&mut self) -> Result<(), ParseError> {
        self.parser.expect(b'{')?;
        self.names.open_scope();
        loop {
            if self.parser.passes(b'{') {
                self.names.open_scope();
                continue;
            }
            if self.parser.passes(b'}') {
                if self.names.close_scope() {
                    break;
                }
                continue;
            }
            match self.parser.peek() {
                // Shared arrays have been placed.
                Some(Token::Word(".pragma" | ".shared")) => self.parser.skip_statement()?,
                Some(Token::Word(".reg")) => self.registers()?,
                Some(Token::Word(".local")) => self.local()?,
                _ => self.statement()?,
            }
        }
        self.code.push(PtxInstruction {
            line: self.parser.line(),
            opcode: "ret",
            guard: None,
            read: Box::default(),
            written: Box::default(),
            action: Executable::End,
        });
        self.resolve_branches()
    }

    /// `.reg .f32 %f<36>, %x;`
    fn registers(&mut self) -> Result<(), ParseError> {
        self.parser.at += 1;
        let kind = self.parser.word()?;
        loop {
            let name = self.parser.word()?;
            let mut count = None;
            if self.parser.passes(b'<') {
                count = Some(self.parser.integer()? as usize);
                self.parser.expect(b'>')?;
            }
            self.names.declare(kind, name, count);
            if !self.parser.passes(b',') {
                return self.parser.expect(b';');
            }
        }
    }

    fn local(&mut self) -> Result<(), ParseError> {
        self.parser.at += 1;
        let declaration = self.parser.declaration()?;
        let base = self
            .local_bytes
            .next_multiple_of(declaration.alignment as usize);
        self.local_bytes = base + declaration.bytes();
        self.names.variables.insert(declaration.name, base as u64);
        self.parser.expect(b';')
    }

    /// A label, or an instruction.
    fn statement(&mut self) -> Result<(), ParseError> {
        let line = self.parser.line();
        let mut guard = None;
        if self.parser.passes(b'@') {
            let is_negated = self.parser.passes(b'!');
            let name = self.parser.word()?;
            guard = Some(if is_negated {
                PtxOperand::Not(name)
            } else {
                PtxOperand::Name(name)
            });
        }
        let word = self.parser.word()?;
        if guard.is_none() && self.parser.passes(b':') {
            let label = self.names.label(word);
            self.places.push((label, self.code.len()));
            return Ok(());
        }
        let refuse = |message| ParseError { line, message };
        let Some((opcode, decode)) = opcodes::find(word) else {
            return Err(refuse(format!("unknown opcode `{word}`")));
        };
        let list = self.operands()?;
        let mut operands = PtxOperands {
            names: &mut self.names,
            list,
            read: Vec::new(),
            written: Vec::new(),
        };
        let action =
            decode(&mut operands).map_err(|message| refuse(format!("{word}: {message}")))?;
        let read = std::mem::take(&mut operands.read).into();
        let written = std::mem::take(&mut operands.written).into();
        let guard = guard.map(|guard| {
            operands.list = vec![guard];
            operands.condition(0)
        });
        let guard: Option<Condition> = guard.transpose().map_err(refuse)?;
        self.code.push(PtxInstruction {
            line,
            opcode,
            guard,
            read,
            written,
            action,
        });
        Ok(())
    }

    fn operands(&mut self) -> Result<Vec<PtxOperand<'t>>, ParseError> {
        let mut list = Vec::new();
        if self.parser.passes(b';') {
            return Ok(list);
        }
        loop {
            list.push(self.operand()?);
            if !self.parser.passes(b',') {
                self.parser.expect(b';')?;
                return Ok(list);
            }
        }
    }

    fn operand(&mut self) -> Result<PtxOperand<'t>, ParseError> {
        if self.parser.passes(b'{') {
            let mut elements = Vec::new();
            loop {
                elements.push(self.operand()?);
                if !self.parser.passes(b',') {
                    self.parser.expect(b'}')?;
                    return Ok(PtxOperand::Vector(elements));
                }
            }
        }
        if self.parser.passes(b'[') {
            let base = self.parser.word()?;
            let offset =
                match self.parser.passes(b'+') || self.parser.peek() == Some(Token::Mark(b'-')) {
                    true => self.parser.integer()? as i64,
                    false => 0,
                };
            self.parser.expect(b']')?;
            return Ok(PtxOperand::Indirect(base, offset));
        }
        if self.parser.passes(b'!') {
            return self.parser.word().map(PtxOperand::Not);
        }
        match self.parser.peek() {
            Some(Token::Word(first)) => {
                self.parser.at += 1;
                match self.parser.passes(b'|') {
                    true => Ok(PtxOperand::Pair(first, self.parser.word()?)),
                    false => Ok(PtxOperand::Name(first)),
                }
            }
            Some(Token::Float(bits)) => {
                self.parser.at += 1;
                Ok(PtxOperand::Float(bits))
            }
            Some(Token::Double(bits)) => {
                self.parser.at += 1;
                Ok(PtxOperand::Double(bits))
            }
            _ => self.parser.integer().map(PtxOperand::Integer),
        }
    }

    /// Puts instructions in the place of labels.
    fn resolve_branches(&mut self) -> Result<(), ParseError> {
        let places: HashMap<usize, usize> = self.places.iter().copied().collect();
        for instruction in &mut self.code {
            if let Executable::Branch(target) = &mut instruction.action {
                *target = *places.get(target).ok_or_else(|| ParseError {
                    line: instruction.line,
                    message: "the label is not in this kernel".into(),
                })?;
            }
        }
        Ok(())
    }
}
