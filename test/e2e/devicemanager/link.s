// This file lets newManagerImpl be declared without a body.
